"""Pure: records and arrays in, records out."""
