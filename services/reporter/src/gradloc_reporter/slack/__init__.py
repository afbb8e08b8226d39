"""Slack: what is posted, how, and when. The only door to slack_sdk."""
