//! Go's names of TLS versions, cipher suites, and curves. Pure. Spec 01 §4, §7.5.

/// Strength of a cipher suite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strength {
    /// Recommended cipher suite, accepted without a startup notice.
    Secure,
    /// Supported, but not recommended.
    Insecure,
}

/// Supported curves: P-256, P-384, P-521, X25519, and the hybrids of ML-KEM with P-256, X25519, and P-384.
pub const CURVES: [i32; 7] = [23, 24, 25, 29, 4587, 4588, 4589];

const SECURE: [&str; 15] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
];

const INSECURE: [&str; 12] = [
    "TLS_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
];

/// Strength of a cipher suite by name; `None` if it is unknown.
pub fn cipher_suite(name: &str) -> Option<Strength> {
    if SECURE.contains(&name) {
        return Some(Strength::Secure);
    }
    INSECURE.contains(&name).then_some(Strength::Insecure)
}

/// Whether the name is that of a TLS version; empty for the default.
pub fn is_version(name: &str) -> bool {
    matches!(name, "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" | "VersionTLS13")
}
