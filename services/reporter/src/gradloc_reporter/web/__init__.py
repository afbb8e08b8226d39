"""HTTP: REST, pages, health. The only door to FastAPI and Jinja2."""
