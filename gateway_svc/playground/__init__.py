"""The playground: a page for people, which asks through the gateway's public interface like any other program."""
