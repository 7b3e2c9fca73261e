"""What an installation needs around it, rendered to be read and applied: nothing here changes an account by itself."""
