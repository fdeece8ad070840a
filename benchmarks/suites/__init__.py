"""One module a suite; each has `rows(options)`, which yields rows as they are measured."""
