"""Where drafts come from. A drafter proposes; it never decides what is committed."""
