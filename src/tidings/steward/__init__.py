"""The ledger for other processes: the operations of its wire, who may use them, and connections that carry them."""
