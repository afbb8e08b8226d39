"""Database, REST, web page, Prometheus and Slack."""
