"""What a run would take before it starts: seconds and bytes of a layout, and the search for the best one."""
