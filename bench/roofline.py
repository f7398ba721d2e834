from argparse import Namespace


def run(options: Namespace) -> int:
    return 0
