from tandem.cli.main import main

main()
