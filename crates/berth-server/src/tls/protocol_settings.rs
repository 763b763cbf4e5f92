//! TLS versions, cipher suites, and curves: configured names to rustls settings. Pure. Spec 04 §7.
//!
//! Only suites with authenticated encryption and ephemeral keys are offered. Every name that kubelet knows is accepted;
//! unsupported ones are logged, and are an error only where an explicit list for TLS 1.2 would leave no suite.

use rustls::{
    NamedGroup, SupportedCipherSuite, SupportedProtocolVersion,
    crypto::{
        CryptoProvider, SupportedKxGroup,
        ring::{cipher_suite as ring, default_provider, kx_group},
    },
    version::{TLS12, TLS13},
};

use berth_sys::tls;

/// Cipher suites of TLS 1.3; always offered.
static SUITES_13: [(&str, &SupportedCipherSuite); 3] = [
    ("TLS_AES_128_GCM_SHA256", &ring::TLS13_AES_128_GCM_SHA256),
    ("TLS_AES_256_GCM_SHA384", &ring::TLS13_AES_256_GCM_SHA384),
    ("TLS_CHACHA20_POLY1305_SHA256", &ring::TLS13_CHACHA20_POLY1305_SHA256),
];

/// Supported cipher suites of TLS 1.2 in order of preference, followed by deprecated aliases.
static SUITES_12: [(&str, &SupportedCipherSuite); 8] = [
    ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", &ring::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256),
    ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", &ring::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256),
    ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", &ring::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384),
    ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", &ring::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384),
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", &ring::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", &ring::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256),
    ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", &ring::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256),
    ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", &ring::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256),
];
/// Number of entries before the aliases.
const OWN_NAMES_12: usize = 6;

/// Error: no usable setting remains.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// No supported cipher suite for TLS 1.2.
    #[error("tlsCipherSuites: no supported TLS 1.2 cipher suite in {names}: supported values are {known}")]
    Suites {
        /// Configured names.
        names: String,
        /// Supported names.
        known: String,
    },
    /// No supported curve; lists the configured ones.
    #[error("tlsCurvePreferences: no supported curve in {0}: supported values are 23, 24, 29")]
    Curves(String),
    /// Unknown version name.
    #[error("unknown tls version \"{0}\"")]
    Version(String),
}

/// TLS settings offered by the server.
pub struct ProtocolSettings {
    suites: Vec<(&'static str, SupportedCipherSuite)>,
    groups: Vec<&'static dyn SupportedKxGroup>,
    only_13: bool,
    /// Configured settings that are accepted but not offered.
    pub refused: Vec<String>,
}

impl ProtocolSettings {
    /// Selects settings by Go's names and numbers; see [`super::TlsSettings`].
    ///
    /// # Errors
    /// If no usable setting remains.
    pub fn choose(min_version: &str, suites: &[String], curves: &[i32]) -> Result<Self, OfferError> {
        let mut refused = Vec::new();
        let only_13 = match min_version {
            "" | "VersionTLS12" => false,
            "VersionTLS13" => true,
            "VersionTLS10" | "VersionTLS11" => {
                refused.push(format!("tlsMinVersion: {min_version}, minimum supported version is TLS 1.2"));
                false
            }
            other => return Err(OfferError::Version(other.to_owned())),
        };
        let mut chosen: Vec<_> = SUITES_13.iter().map(|(name, suite)| (*name, **suite)).collect();
        if !only_13 {
            chosen.extend(suites_12(suites, &mut refused)?);
        }
        let groups = groups(curves, &mut refused)?;
        Ok(Self { suites: chosen, groups, only_13, refused })
    }

    /// Names of the cipher suites, as Go spells them.
    pub fn names(&self) -> Vec<&'static str> {
        self.suites.iter().map(|(name, _)| *name).collect()
    }

    /// Offered key exchange groups (curves).
    pub fn group_names(&self) -> Vec<NamedGroup> {
        self.groups.iter().map(|group| group.name()).collect()
    }

    /// Minimum version, by Go's name.
    pub fn min_version(&self) -> &'static str {
        if self.only_13 { "VersionTLS13" } else { "VersionTLS12" }
    }

    /// Offered protocol versions.
    pub fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        if self.only_13 { vec![&TLS13] } else { vec![&TLS13, &TLS12] }
    }

    /// The rustls provider with these suites and groups.
    pub fn provider(&self) -> CryptoProvider {
        CryptoProvider {
            cipher_suites: self.suites.iter().map(|(_, suite)| *suite).collect(),
            kx_groups: self.groups.clone(),
            ..tls::provider()
        }
    }
}

fn suites_12(
    names: &[String],
    refused: &mut Vec<String>,
) -> Result<Vec<(&'static str, SupportedCipherSuite)>, OfferError> {
    let own = SUITES_12.iter().take(OWN_NAMES_12).map(|(name, suite)| (*name, **suite));
    if names.is_empty() {
        return Ok(own.collect());
    }
    let named: Vec<&String> = names.iter().filter(|name| !SUITES_13.iter().any(|(own, _)| own == name)).collect();
    let find = |name: &str| SUITES_12.iter().find(|(own, _)| *own == name).map(|(_, suite)| suite.suite());
    let wanted: Vec<_> = named.iter().filter_map(|name| find(name)).collect();
    refused.extend(named.iter().filter(|name| find(name).is_none()).map(|name| format!("tlsCipherSuites: {name}")));
    if wanted.is_empty() && !named.is_empty() {
        let list = |names: &[&str]| names.join(", ");
        let known: Vec<&str> = own.map(|(name, _)| name).collect();
        let names: Vec<&str> = named.iter().map(|name| name.as_str()).collect();
        return Err(OfferError::Suites { names: list(&names), known: list(&known) });
    }
    Ok(own.filter(|(_, suite)| wanted.contains(&suite.suite())).collect())
}

fn groups(curves: &[i32], refused: &mut Vec<String>) -> Result<Vec<&'static dyn SupportedKxGroup>, OfferError> {
    if curves.is_empty() {
        return Ok(default_provider().kx_groups);
    }
    let mut found = Vec::new();
    for curve in curves {
        match curve {
            23 => found.push(kx_group::SECP256R1),
            24 => found.push(kx_group::SECP384R1),
            29 => found.push(kx_group::X25519),
            other => refused.push(format!("tlsCurvePreferences: {other}")),
        }
    }
    if found.is_empty() {
        let list: Vec<String> = curves.iter().map(ToString::to_string).collect();
        return Err(OfferError::Curves(list.join(", ")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AES_128: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
    const CHACHA: &str = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256";
    const WEAK: &str = "TLS_RSA_WITH_RC4_128_SHA";
    const OF_13: &str = "TLS_AES_128_GCM_SHA256";

    fn choose(version: &str, suites: &[&str], curves: &[i32]) -> Result<ProtocolSettings, OfferError> {
        let suites: Vec<String> = suites.iter().map(|s| (*s).to_owned()).collect();
        ProtocolSettings::choose(version, &suites, curves)
    }

    #[test]
    fn only_strong_suites_are_offered() {
        // TLS 1.2 suites that remain, and settings that are reported as refused.
        for (version, suites, left, refused) in [
            ("", &[][..], 6, 0),
            ("VersionTLS12", &[], 6, 0),
            ("VersionTLS10", &[], 6, 1),
            ("VersionTLS11", &[], 6, 1),
            ("VersionTLS13", &[], 0, 0),
            ("VersionTLS13", &[WEAK], 0, 0),
            ("", &[AES_128], 1, 0),
            ("", &[AES_128, WEAK, "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"], 1, 2),
            ("", &["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", CHACHA], 1, 0),
            ("", &[OF_13], 0, 0),
            ("", &[OF_13, AES_128], 1, 0),
        ] {
            let offer = choose(version, suites, &[]).expect("something is left");
            assert_eq!((offer.names().len(), offer.refused.len()), (3 + left, refused), "{version} {suites:?}");
            assert_eq!(offer.versions().len(), if version == "VersionTLS13" { 1 } else { 2 });
        }
        let names = choose("", &[], &[]).expect("all").names();
        assert!(names.iter().all(|name| name.contains("GCM") || name.contains("CHACHA20")), "CIS 4.2.12: {names:?}");
    }

    #[test]
    fn curves_come_in_the_order_asked_for() {
        use NamedGroup::{X25519, secp256r1, secp384r1};
        for (curves, left, refused) in [
            (&[][..], vec![X25519, secp256r1, secp384r1], 0),
            (&[24, 23], vec![secp384r1, secp256r1], 0),
            (&[4588, 29, 25], vec![X25519], 2),
        ] {
            let offer = choose("", &[], curves).expect("something is left");
            assert_eq!((offer.group_names(), offer.refused.len()), (left, refused), "{curves:?}");
        }
    }

    #[test]
    fn nothing_left_is_an_error() {
        let error_text = |offer: Result<ProtocolSettings, OfferError>| {
            offer.map(|o| o.names()).expect_err("nothing is left").to_string()
        };
        assert!(
            error_text(choose("", &[WEAK], &[]))
                .starts_with("tlsCipherSuites: no supported TLS 1.2 cipher suite in TLS_RSA_WITH_RC4_128_SHA")
        );
        assert!(
            error_text(choose("", &[OF_13, WEAK], &[]))
                .starts_with("tlsCipherSuites: no supported TLS 1.2 cipher suite in")
        );
        assert!(error_text(choose("", &[], &[25])).starts_with("tlsCurvePreferences: no supported curve in 25"));
        assert_eq!(error_text(choose("1.2", &[], &[])), "unknown tls version \"1.2\"");
    }
}
