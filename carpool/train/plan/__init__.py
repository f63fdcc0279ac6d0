"""What will a run be? Settings and a machine in, all decisions out, each with its reason; a dry run ends here."""
