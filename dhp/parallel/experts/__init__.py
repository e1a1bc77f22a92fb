"""Decoders with experts: their weights over tensor ranks or over replicas, and the exchange of tokens."""
