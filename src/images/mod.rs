//! Presence and permission of images: pull policy, credentials, pull records, image GC.
