"""An EAGLE-3 draft head trained from a lake: draft, loss, evaluate, train."""
