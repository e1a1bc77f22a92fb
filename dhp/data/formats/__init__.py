"""One file for each way of writing a conversation: each turns a raw mapping into the turns of a Record."""
