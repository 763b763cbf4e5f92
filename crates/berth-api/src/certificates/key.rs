//! EC P-256 private keys: PEM encoding (SEC 1 and PKCS #8) and certificate signing requests.
//!
//! Writes `EC PRIVATE KEY`, as the kubelet does, and reads both forms. The crypto library supports PKCS #8 only. Both
//! forms have the same content and are converted here, so that Berth can use a key that the kubelet wrote and vice
//! versa.

use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
    string::Ia5String,
};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject};

use super::template::Template;

/// DER tags.
const SEQUENCE: u8 = 0x30;
const OCTETS: u8 = 0x04;
const CURVE: u8 = 0xa0;
const POINT: u8 = 0xa1;
/// Version 1 of an EC private key, version 0 of its PKCS #8 wrapping.
const ONE: &[u8] = &[0x02, 0x01, 0x01];
const ZERO: &[u8] = &[0x02, 0x01, 0x00];
/// Object identifiers: EC public key, P-256.
const ELLIPTIC: &[u8] = &[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const P256: &[u8] = &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
/// Characters per PEM line.
const LINE: usize = 64;

/// A key operation failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {0}: {1}")]
pub struct KeyError(&'static str, rcgen::Error);

/// P-256 private key.
#[derive(Debug)]
pub struct PrivateKey(KeyPair);

impl PrivateKey {
    /// Generates a key.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn generate() -> Result<Self, KeyError> {
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map(Self).map_err(|e| KeyError("generate key", e))
    }

    /// First key of a PEM text; `None` if that is no P-256 key.
    pub fn read(pem: &str) -> Option<Self> {
        let pkcs8 = match PrivateKeyDer::from_pem_slice(pem.as_bytes()).ok()? {
            PrivateKeyDer::Pkcs8(key) => key.secret_pkcs8_der().to_vec(),
            PrivateKeyDer::Sec1(key) => wrapped(key.secret_sec1_der()),
            _ => return None,
        };
        KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(pkcs8), &PKCS_ECDSA_P256_SHA256).ok().map(Self)
    }

    /// Encodes the key as `EC PRIVATE KEY`.
    pub fn to_pem(&self) -> String {
        match named(self.0.serialized_der(), self.0.public_key_raw()) {
            Some(der) => pem("EC PRIVATE KEY", &der),
            None => self.0.serialize_pem(),
        }
    }

    /// Public key with its algorithm (PKIX).
    pub fn public(&self) -> Vec<u8> {
        self.0.subject_public_key_info()
    }

    /// Signs a request for the subject and names of the template, PEM.
    ///
    /// # Errors
    /// A name cannot be encoded.
    pub fn request(&self, template: &Template) -> Result<String, KeyError> {
        let wrong = |e| KeyError("encode certificate signing request", e);
        let mut params = CertificateParams::default();
        let mut subject = DistinguishedName::new();
        subject.push(DnType::OrganizationName, Template::ORGANIZATION);
        subject.push(DnType::CommonName, template.common_name());
        params.distinguished_name = subject;
        for name in &template.dns {
            params.subject_alt_names.push(SanType::DnsName(Ia5String::try_from(name.as_str()).map_err(wrong)?));
        }
        params.subject_alt_names.extend(template.ips.iter().copied().map(SanType::IpAddress));
        params.serialize_request(&self.0).and_then(|request| request.pem()).map_err(wrong)
    }
}

/// Wraps a SEC 1 key in PKCS #8.
fn wrapped(key: &[u8]) -> Vec<u8> {
    let algorithm = element(SEQUENCE, &[ELLIPTIC, P256].concat());
    element(SEQUENCE, &[ZERO.to_vec(), algorithm, element(OCTETS, key)].concat())
}

/// Converts PKCS #8 to SEC 1 with the curve's identifier; `None` if the key does not have the expected structure.
fn named(pkcs8: &[u8], public: &[u8]) -> Option<Vec<u8>> {
    let (_, all, _) = first(pkcs8)?;
    let (_, _, rest) = first(all)?;
    let (_, _, rest) = first(rest)?;
    let (_, inner, _) = first(rest)?;
    let (_, key, _) = first(inner)?;
    let (_, _, rest) = first(key)?;
    let (tag, secret, _) = first(rest)?;
    if tag != OCTETS {
        return None;
    }
    let point = element(0x03, &[&[0], public].concat());
    let parts = [ONE.to_vec(), element(OCTETS, secret), element(CURVE, P256), element(POINT, &point)];
    Some(element(SEQUENCE, &parts.concat()))
}

/// First DER element: its tag, its content, and the remaining bytes.
pub(crate) fn first(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = der.split_first()?;
    let (short, rest) = rest.split_first()?;
    let (length, rest) = if *short < 0x80 {
        (usize::from(*short), rest)
    } else {
        let (bytes, rest) = rest.split_at_checked(usize::from(short & 0x7f)).filter(|(bytes, _)| bytes.len() <= 2)?;
        (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

/// Encodes a DER element.
pub(crate) fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut out = vec![tag];
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short), _) if short < 0x80 => out.push(short),
        (Ok(byte), _) => out.extend([0x81, byte]),
        (_, Ok(word)) => out.extend([&[0x82], &word.to_be_bytes()[..]].concat()),
        // No P-256 key is that long; the parser rejects the result.
        _ => {}
    }
    out.extend_from_slice(content);
    out
}

/// Encodes a PEM block.
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut out = format!("-----BEGIN {label}-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, more) = rest.split_at(rest.len().min(LINE)); // base64 is ASCII
        out.extend([line, "\n"]);
        rest = more;
    }
    out.extend(["-----END ", label, "-----\n"]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_being_written_and_read() {
        let key = PrivateKey::generate().expect("a key");
        let pem = key.to_pem();
        assert!(pem.starts_with("-----BEGIN EC PRIVATE KEY-----\n") && pem.ends_with("-----END EC PRIVATE KEY-----\n"));
        let again = PrivateKey::read(&pem).expect("readable");
        assert_eq!(again.public(), key.public());
        assert_eq!(again.to_pem(), pem);
        assert_eq!(PrivateKey::read(&key.0.serialize_pem()).expect("PKCS #8").public(), key.public());
    }

    #[test]
    fn what_is_no_key_is_none() {
        let whole = PrivateKey::generate().expect("a key").to_pem();
        let body = whole.lines().nth(1).expect("a line");
        for text in [
            String::new(),
            "no PEM".to_owned(),
            whole.replace("EC PRIVATE", "RSA PRIVATE"),
            format!("-----BEGIN EC PRIVATE KEY-----\n{body}\n-----END EC PRIVATE KEY-----\n"),
            "-----BEGIN PRIVATE KEY-----\nMAMCAQA=\n-----END PRIVATE KEY-----\n".to_owned(),
        ] {
            assert!(PrivateKey::read(&text).is_none(), "{text}");
        }
        for der in [&[][..], &[0x30], &[0x30, 0x82], &[0x30, 0x84, 1, 1, 1, 1], &[0x30, 5, 1]] {
            assert_eq!(first(der), None, "{der:?}");
        }
    }
}
