"""The recipes that make samples of a row: tokens and labels of tables and streams, whole, masked or per turn."""
