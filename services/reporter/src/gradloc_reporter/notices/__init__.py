"""Receivers other than Slack: webhooks, e-mail, Alertmanager; and what all receivers have in common."""
