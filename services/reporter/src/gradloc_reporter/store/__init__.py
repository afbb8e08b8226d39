"""The reporter's database: tables, migrations, and how messages become rows and rows become answers."""

from sqlalchemy.exc import DBAPIError, OperationalError, StatementError
from sqlalchemy.orm import Session

# For those who catch its errors or hand its sessions on: the store is the only door to SQLAlchemy.
__all__ = ["DBAPIError", "OperationalError", "Session", "StatementError"]
