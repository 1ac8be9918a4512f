"""The tables of the formats `relay_originals` and `relay_files`: what lies in a home's folders."""

from __future__ import annotations

from pyspark.sql.types import StructType

from relay.audit.schemas.fields import NUMBER, TEXT, TIME, WORDS, always, maybe

ORIGINAL = StructType(
    [
        always("path", TEXT, "below the home, as the ledger's file_path; in a pack, too"),
        maybe("message_id", TEXT, "stem of the file's name, of a refused one whatever it was"),
        always("kind", TEXT, "original, rejected, duplicate; pack: a pack that cannot be read"),
        always("day", TEXT, "2026-01-31, of the archive's folder"),
        maybe("agent", TEXT, "sender"),
        maybe("pack", TEXT, "the pack that it was read from; NULL: a file of its own"),
        maybe("size", NUMBER, "bytes, header and body"),
        maybe("checksum", TEXT, "SHA-256 of the content, 64 hex, as the ledger's"),
        maybe("sha256", TEXT, "of the whole file, 64 hex"),
        maybe("target", TEXT, "the TO header; empty: the header is that of no message"),
        maybe("message_type", TEXT, "the KIND header; likewise"),
        maybe("priority", TEXT, "Critical, High, Normal, Low, Background; likewise"),
        maybe("ttl_s", NUMBER, "the TTL header; NULL: none"),
        maybe("topic", TEXT, "the TOPIC header; NULL: none"),
        maybe("thread", TEXT, "the THREAD header, as the UUID v4 of its thread; NULL: none"),
        maybe("changed_at", TIME, "of the inode: when it came here; NULL in a pack"),
        maybe("problem", TEXT, "why it could not be read"),
    ]
)

KEPT_FILE = StructType(
    [
        always("path", TEXT, "below the home; of Tier 2, the object's key"),
        always("kind", TEXT, "store, archive, journal, segment, object, attachment"),
        maybe("day", TEXT, "2026-01-31, of what never changes again; NULL: it may"),
        maybe("item", TEXT, "what it is called in whatever tier it lies"),
        maybe("size", NUMBER, "bytes"),
        maybe("sha256", TEXT, "of the file; of a segment size and crc64 of its records"),
        always("problems", WORDS, "what is wrong with it, a line each"),
        always("warnings", WORDS, "what is only worth knowing"),
    ]
)
