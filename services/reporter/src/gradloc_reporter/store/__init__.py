"""The reporter's database: tables, migrations, and how messages become rows and rows become answers."""
