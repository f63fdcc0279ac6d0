from carpool.cli import main

main()
