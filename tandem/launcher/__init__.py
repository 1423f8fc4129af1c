"""`tandem serve`: the whole stack on one machine, as child processes of one launcher."""
