"""What layers compute with beside attention: norms, rotary positions and gates in few passes over memory."""
