"""What measures and proves the runtime: its commands, and the instruments behind them; never imported by it."""
