//! Reads the fields of a certificate that decide about its use and renewal. Pure.

use std::net::IpAddr;

use base64::Engine;
use jiff::Timestamp;
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer, X509Certificate, X509Name},
};

/// Share of its validity period, in percent, after which a certificate is renewed.
const OLD: i64 = 90;

/// Fields of a certificate that the agent uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// Common names of subject and issuer.
    pub(super) names: (String, String),
    /// DNS names and IP addresses of the subject alternative names.
    pub(super) hosts: Vec<String>,
    /// Validity period in Unix seconds: not before, not after.
    pub(super) valid: (i64, i64),
    /// True if its extended key usage allows server authentication.
    pub(super) serves: bool,
    /// SHA-256 of the public key info (SPKI), in base64: the pin for clients.
    pub(super) pin: String,
}

impl CertificateInfo {
    /// Parses the first certificate of a PEM text; `None` if there is none or it is invalid.
    pub fn read(pem: &str) -> Option<Self> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        let (_, certificate) = X509Certificate::from_der(&der).ok()?;
        let name = |name: &X509Name<'_>| {
            name.iter_common_name().last().and_then(|cn| cn.as_str().ok()).unwrap_or_default().to_owned()
        };
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        let hosts = alternatives.iter().flat_map(|list| &list.value.general_names).filter_map(host).collect();
        let validity = certificate.validity();
        let usage = certificate.extended_key_usage().ok().flatten();
        Some(Self {
            names: (name(certificate.subject()), name(certificate.issuer())),
            hosts,
            valid: (validity.not_before.timestamp(), validity.not_after.timestamp()),
            serves: usage.is_none_or(|usage| usage.value.server_auth || usage.value.any),
            pin: base64::engine::general_purpose::STANDARD.encode(Sha256::digest(certificate.public_key().raw)),
        })
    }

    /// True if a client that trusts it and connects by one of its names accepts it at that time.
    pub fn is_accepted(&self, now: Timestamp) -> bool {
        let (first, last) = self.valid;
        self.serves && (first..=last).contains(&now.as_second())
    }

    /// SHA-256 of the public key info (SPKI), in base64.
    pub fn pin(&self) -> &str {
        &self.pin
    }

    /// True if Berth or kubelet generated it, judged by the form of its names.
    pub fn is_self_made(&self) -> bool {
        let is_stamped = |name: &str, mark: &str| {
            name.rsplit_once('@').is_some_and(|(name, time)| name.ends_with(mark) && time.parse::<u64>().is_ok())
        };
        is_stamped(&self.names.0, "") && is_stamped(&self.names.1, "-ca")
    }

    /// True if most of its validity period is over, or it is not yet valid.
    pub fn is_old(&self, now: Timestamp) -> bool {
        let (first, last) = self.valid;
        let share = (last.saturating_sub(first) / 100).saturating_mul(OLD);
        let now = now.as_second();
        now < first || now > first.saturating_add(share)
    }

    /// True if it is valid for that DNS name or IP address.
    pub fn is_for(&self, host: &str) -> bool {
        let wanted = host.parse::<IpAddr>();
        self.hosts.iter().any(|own| match &wanted {
            Ok(address) => own.parse::<IpAddr>().is_ok_and(|own| own == *address),
            Err(_) => own.eq_ignore_ascii_case(host),
        })
    }

    /// First DNS name it is for that is not a wildcard.
    pub fn any_name(&self) -> Option<&str> {
        self.hosts.iter().map(String::as_str).find(|host| host.parse::<IpAddr>().is_err() && !host.starts_with('*'))
    }
}

fn host(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let four = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            four.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from)).ok().map(|address| address.to_string())
        }
        _ => None,
    }
}

/// True if certificate and key belong together.
pub fn key_matches(certificate: &str, key: &str) -> bool {
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes());
    let (Ok(certificate), Ok(key)) = (certificate, PrivateKeyDer::from_pem_slice(key.as_bytes())) else {
        return false;
    };
    CertifiedKey::from_der(vec![certificate], key, &rustls::crypto::ring::default_provider()).is_ok()
}

/// True if the certificate is valid for all of these hosts.
pub fn covers(seen: &CertificateInfo, hosts: &[String]) -> bool {
    hosts.iter().all(|host| seen.is_for(host))
}
