"""Which samples go into which pack, and which packs into which step, so that devices do not wait for one another."""
