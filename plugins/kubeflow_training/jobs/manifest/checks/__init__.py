"""What would be refused, or would fail later: found before any pod exists, and told with the mend. Pure."""
