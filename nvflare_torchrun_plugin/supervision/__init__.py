"""One group from start to verdict: its agents, what they say, and how it ends."""
