"""Run by Alembic with the connection that `engine.migrate` hands over; there is no ini file."""

from alembic import context

from gradloc_reporter.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
