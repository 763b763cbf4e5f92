//! Private keys of pods, and the empty PKCS #10 requests that prove possession (spec 07 §9.4).
//!
//! Blocking: RSA takes seconds. The crypto library signs with all key types but P-521, and cannot generate RSA keys;
//! both come from separate crates. All keys are PKCS #8 version 1, because older programs cannot read version 2, in
//! which the library encodes Ed25519.

use p521::{
    ecdsa::{Signature, SigningKey, signature::RandomizedSigner},
    elliptic_curve::sec1::ToEncodedPoint,
    pkcs8::EncodePrivateKey,
};
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
    PKCS_RSA_SHA256,
};
use rsa::{RsaPrivateKey, rand_core::OsRng};
use rustls::pki_types::PrivatePkcs8KeyDer;

use crate::certificates::{element, first, pem};

/// DER tags.
const SEQUENCE: u8 = 0x30;
const OCTETS: u8 = 0x04;
const BITS: u8 = 0x03;
const ATTRIBUTES: u8 = 0xa0;
const ZERO: &[u8] = &[0x02, 0x01, 0x00];
/// Object identifiers: EC public key, P-521, ECDSA with SHA-512, Ed25519.
const ELLIPTIC: &[u8] = &[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const P521: &[u8] = &[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x23];
const ECDSA_SHA512: &[u8] = &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x04];
const ED25519: &[u8] = &[0x06, 0x03, 0x2b, 0x65, 0x70];

/// Why a key cannot be generated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// The key type is unknown.
    #[error("unknown key type {0:?}")]
    Unknown(String),
    /// Key generation or encoding failed.
    #[error("cannot generate key of type {0}: {1}")]
    Failed(String, String),
}

/// Private key of a pod certificate, with the PKCS #10 request that proves its possession.
pub struct GeneratedKey {
    /// PKCS #8, PEM.
    pub key: String,
    /// Empty PKCS #10 request signed by the key, DER.
    pub stub: Vec<u8>,
}

/// Generates a key of that type (`keyType`). Blocking.
///
/// # Errors
/// The type is unknown, or generation failed.
pub fn make(kind: &str) -> Result<GeneratedKey, KeyError> {
    let made = match kind {
        "RSA3072" => rsa_of(3072),
        "RSA4096" => rsa_of(4096),
        "ECDSAP256" => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(text).and_then(|pair| of_pair(&pair)),
        "ECDSAP384" => KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).map_err(text).and_then(|pair| of_pair(&pair)),
        "ECDSAP521" => p521_of(),
        "ED25519" => KeyPair::generate_for(&PKCS_ED25519).map_err(text).and_then(|pair| {
            let made = of_pair(&pair)?;
            let der = first_version(pair.serialized_der()).ok_or("unexpected PKCS #8 encoding")?;
            Ok(GeneratedKey { key: pem("PRIVATE KEY", &der), ..made })
        }),
        other => return Err(KeyError::Unknown(other.to_owned())),
    };
    made.map_err(|cause| KeyError::Failed(kind.to_owned(), cause))
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

fn of_pair(pair: &KeyPair) -> Result<GeneratedKey, String> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(pair).map_err(text)?;
    Ok(GeneratedKey { key: pem("PRIVATE KEY", pair.serialized_der()), stub: request.der().to_vec() })
}

fn rsa_of(bits: usize) -> Result<GeneratedKey, String> {
    let key = RsaPrivateKey::new(&mut OsRng, bits).map_err(text)?;
    let der = key.to_pkcs8_der().map_err(text)?;
    let der = PrivatePkcs8KeyDer::from(der.as_bytes());
    of_pair(&KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_RSA_SHA256).map_err(text)?)
}

fn p521_of() -> Result<GeneratedKey, String> {
    let secret = p521::SecretKey::random(&mut OsRng);
    let point = secret.public_key().to_encoded_point(false);
    let key = secret.to_pkcs8_der().map_err(text)?;
    let signing = SigningKey::from_bytes(&secret.to_bytes()).map_err(text)?;
    let public = [element(SEQUENCE, &[ELLIPTIC, P521].concat()), element(BITS, &[&[0], point.as_bytes()].concat())];
    // Version, empty subject, public key, no attributes (RFC 2986).
    let asked = [ZERO.to_vec(), element(SEQUENCE, &[]), element(SEQUENCE, &public.concat()), element(ATTRIBUTES, &[])];
    let asked = element(SEQUENCE, &asked.concat());
    let signature: Signature = signing.try_sign_with_rng(&mut OsRng, &asked).map_err(text)?;
    let signed = element(BITS, &[&[0], signature.to_der().as_bytes()].concat());
    let stub = element(SEQUENCE, &[asked, element(SEQUENCE, ECDSA_SHA512), signed].concat());
    Ok(GeneratedKey { key: pem("PRIVATE KEY", key.as_bytes()), stub })
}

/// Strips the public key that PKCS #8 version 2 appends to an Ed25519 key.
fn first_version(pkcs8: &[u8]) -> Option<Vec<u8>> {
    let (_, all, _) = first(pkcs8)?;
    let (_, _version, rest) = first(all)?;
    let (_, algorithm, rest) = first(rest)?;
    let (tag, secret, _) = first(rest)?;
    let parts = [ZERO.to_vec(), element(SEQUENCE, algorithm), element(OCTETS, secret)];
    (algorithm == ED25519 && tag == OCTETS).then(|| element(SEQUENCE, &parts.concat()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer};

    use super::*;

    /// Output of openssl; `None` where it is not installed.
    fn openssl(arguments: &[&str], input: &[u8]) -> Option<String> {
        let mut started = Command::new("openssl");
        let started = started.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let Ok(mut started) = started.spawn() else {
            println!("skipped: needs openssl");
            return None;
        };
        started.stdin.take().expect("piped").write_all(input).expect("it reads");
        let done = started.wait_with_output().expect("it ends");
        let output = [done.stdout, done.stderr].concat();
        let output = String::from_utf8_lossy(&output).into_owned();
        assert!(done.status.success(), "{arguments:?}: {output}");
        Some(output)
    }

    fn check(kind: &str, named: &str) {
        let made = make(kind).expect(kind);
        assert!(made.key.starts_with("-----BEGIN PRIVATE KEY-----\n"), "{kind}");
        let (rest, request) = X509CertificationRequest::from_der(&made.stub).expect(kind);
        let asked = &request.certification_request_info;
        assert!(rest.is_empty() && asked.subject.iter().next().is_none() && asked.attributes().is_empty(), "{kind}");
        let verify = ["req", "-inform", "DER", "-verify", "-noout", "-text"];
        let Some(output) = openssl(&verify, &made.stub) else { return };
        assert!(output.contains(named), "{kind}: {output}");
        let public = openssl(&["req", "-inform", "DER", "-pubkey", "-noout"], &made.stub);
        assert_eq!(openssl(&["pkey", "-pubout"], made.key.as_bytes()), public, "{kind}: of this key");
    }

    #[test]
    fn keys_of_each_type_sign_an_empty_request() {
        for (kind, named) in [
            ("ECDSAP256", "prime256v1"),
            ("ECDSAP384", "secp384r1"),
            ("ECDSAP521", "secp521r1"),
            ("ED25519", "ED25519"),
            ("RSA3072", "(3072 bit)"),
        ] {
            check(kind, named);
        }
    }

    #[test]
    fn no_other_keys_are_made() {
        for kind in ["", "RSA", "RSA2048", "ecdsap256"] {
            assert_eq!(make(kind).err(), Some(KeyError::Unknown(kind.to_owned())));
        }
    }
}
