//! TLS configuration compatible with Go's `crypto/x509`: everything Go trusts is trusted here.
//!
//! The library ([`rustls`] with `ring` and `webpki`) supports fewer signatures than Go, and accepts neither an
//! authority as a server certificate nor a server certificate as its own authority. [`provider`] adds the signatures,
//! [`ServerVerifier`] and [`verify_pinned`] the rest.
//! The verifiers that check less than Go does are in `verifier.rs`, too.

mod signatures;
mod verifier;

use rustls::crypto::{CryptoProvider, ring};

pub use verifier::{
    NoVerification, PinnedServer, ServerCertificates, ServerPolicy, ServerVerifier, SignatureOnly, TrustedAuthorities,
    Use, Verifier, verify_pinned,
};

/// Crypto provider of all TLS connections.
pub fn provider() -> CryptoProvider {
    CryptoProvider { signature_verification_algorithms: signatures::all(), ..ring::default_provider() }
}
