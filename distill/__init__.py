"""Makes a small draft model for a target out of the target's own answers: `tandem distill`. See docs/distill.md."""
