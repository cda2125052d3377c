"""What an attempt is going to run, and where, decided in full before anything is started."""
