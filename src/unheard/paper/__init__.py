"""The publication as data: its runs as recipes, its printed numbers, a file for each table and figure."""
