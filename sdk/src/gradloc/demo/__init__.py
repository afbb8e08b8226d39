"""The demo: a real GRPO run of a small transformer, a real fault, and a judge who alone knows the truth."""
