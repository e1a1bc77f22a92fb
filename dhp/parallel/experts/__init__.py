"""Decoders with experts: their weights over tensor ranks or over replicas, and tokens on their way to them."""
