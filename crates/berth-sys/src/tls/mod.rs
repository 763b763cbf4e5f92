//! TLS as the reference speaks it: whatever Go's `crypto/x509` believes is believed here.
//!
//! The library ([`rustls`] with `ring` and `webpki`) knows fewer signatures than Go and takes no authority for a server, nor
//! a server's own certificate for an authority. [`provider`] adds the signatures, [`ServerVerifier`] and [`verify_pinned`] the rest.

mod signatures;
mod verifier;

use rustls::crypto::{CryptoProvider, ring};

pub use verifier::{ServerVerifier, Use, verify_pinned};

/// The provider of all our connections.
pub fn provider() -> CryptoProvider {
    CryptoProvider { signature_verification_algorithms: signatures::all(), ..ring::default_provider() }
}
