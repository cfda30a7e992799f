"""What is minimised, one file per kind of draft, registered in `OBJECTIVES`."""
