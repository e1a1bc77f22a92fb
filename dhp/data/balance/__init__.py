"""Balances samples over packs and packs over steps."""
