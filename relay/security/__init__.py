"""Security: keys and signatures, what may stand open, what nobody may see.

    keyfile           key files: 32 bytes of mode 600
    signatures        Ed25519, and what is signed
    trust, signing    whose key counts; whether a message is signed with it
    hardening         whose the home's directories and files are, and open to whom
    incidents         what should not have been there, a kind each
    redaction         a spawn without the values of its ENV

What each gives, and what not: docs/security.md.
"""
