"""How an operator is defined, checked, dispatched and told what machine it runs on."""
