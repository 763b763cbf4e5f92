//! `CertificateSigningRequest` objects: name, body, and compatibility with an existing one. Pure.
//!
//! Implements spec 01 §11.2-11.3.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject};
use serde_json::{Value, json};
use sha2::{Digest, Sha512_256};
use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer};

use super::{leaf, progress::CsrObject, template::Template};
use crate::api::Resource;

/// Name prefix of rotation CSRs.
const PREFIX: &str = "csr-";
/// Hexadecimal digits of the digest in the name: 80 bits.
const DIGITS: usize = 20;

/// Naming scheme of CSR objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamingScheme {
    /// `node-csr-…`: the first certificate, requested before anything else runs.
    Bootstrap,
    /// `csr-…`: all other certificates.
    Rotation,
}

/// Name of the CSR: a digest of key and subject, so that a repeated creation is idempotent. For rotations the kubelet
/// uses server-generated names, and leaves a CSR behind whenever a response is lost (AC-10-36).
pub fn name(naming: NamingScheme, public: &[u8], template: &Template) -> String {
    let digest = digest(public, template);
    match naming {
        NamingScheme::Bootstrap => format!("node-csr-{}", URL_SAFE_NO_PAD.encode(digest)),
        NamingScheme::Rotation => {
            let mut digits = hex::encode(digest);
            digits.truncate(DIGITS);
            format!("{PREFIX}{digits}")
        }
    }
}

fn digest(public: &[u8], template: &Template) -> Vec<u8> {
    let mut hash = Sha512_256::new();
    let common_name = template.common_name();
    let parts = [public, common_name.as_bytes(), Template::ORGANIZATION.as_bytes()];
    for part in parts.into_iter().chain(template.purpose.usages().map(str::as_bytes)) {
        hash.update(URL_SAFE_NO_PAD.encode(part));
        hash.update("|");
    }
    hash.finalize().to_vec()
}

/// Builds the CSR object. `request` is PEM.
pub fn object(resource: &Resource, naming: NamingScheme, name: &str, request: &str, template: &Template) -> Value {
    let mut metadata = json!({"name": name});
    if naming == NamingScheme::Rotation {
        metadata = json!({"generateName": PREFIX, "name": name});
    }
    json!({
        "apiVersion": resource.api_version(),
        "kind": resource.kind,
        "metadata": metadata,
        "spec": {
            "request": STANDARD.encode(request),
            "signerName": template.purpose.signer(),
            "usages": template.purpose.usages(),
        },
    })
}

/// Checks whether an existing CSR is equivalent to ours, so that its certificate can be used.
///
/// # Errors
/// A text that names the difference.
pub fn compatible(there: &CsrObject, request: &str, template: &Template, now: i64) -> Result<(), String> {
    let signer = template.purpose.signer();
    if there.spec.signer_name != signer {
        return Err(format!("csr signerNames differ: new {signer:?}, orig: {:?}", there.spec.signer_name));
    }
    let (Some(theirs), Some(ours)) = (there.request().as_deref().and_then(asked), asked(request)) else {
        return Err("cannot parse certificate signing request".to_owned());
    };
    if theirs.subject != ours.subject {
        return Err("csr subjects differ".to_owned());
    }
    if theirs.public != ours.public {
        return Err("csr public keys differ".to_owned());
    }
    match there.certificate() {
        Some(pem) if !leaf::all_hold(&pem, now) => Err("one of the certificates for the CSR has expired".to_owned()),
        _ => Ok(()),
    }
}

struct ParsedRequest {
    subject: Vec<u8>,
    public: Vec<u8>,
}

fn asked(pem: &str) -> Option<ParsedRequest> {
    let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, request) = X509CertificationRequest::from_der(&der).ok()?;
    let info = request.certification_request_info;
    Some(ParsedRequest { subject: info.subject.as_raw().to_vec(), public: info.subject_pki.raw.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::key::PrivateKey;

    #[test]
    fn a_request_is_called_by_what_it_asks() {
        let template = Template::client("n");
        // printf 'a2V5|c3lzdGVtOm5vZGU6bg|c3lzdGVtOm5vZGVz|ZGlnaXRhbCBzaWduYXR1cmU|Y2xpZW50IGF1dGg|' |
        // openssl dgst -sha512-256 -binary | basenc --base64url
        assert_eq!(
            name(NamingScheme::Bootstrap, b"key", &template),
            "node-csr-litVUSUtPM4znXCAy-mNiVlLUDyk-MwyFQaIhfgqZnQ"
        );
        let rotation = name(NamingScheme::Rotation, b"key", &template);
        assert!(rotation.starts_with("csr-") && rotation.len() == 24, "{rotation}");
        assert_ne!(rotation, name(NamingScheme::Rotation, b"other", &template));
        assert_ne!(rotation, name(NamingScheme::Rotation, b"key", &Template::client("m")));
    }

    #[test]
    fn the_object_has_the_signer_and_usages_of_the_template() {
        // AC-01-32
        let template = Template::client("n");
        let made = object(&Resource::SIGNING_REQUESTS, NamingScheme::Rotation, "csr-x", "PEM", &template);
        let expected = json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"generateName": "csr-", "name": "csr-x"},
            "spec": {
                "request": "UEVN",
                "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
                "usages": ["digital signature", "client auth"],
            },
        });
        assert_eq!(made, expected);
        let made = object(&Resource::SIGNING_REQUESTS, NamingScheme::Bootstrap, "node-csr-x", "PEM", &template);
        assert_eq!(made["metadata"], json!({"name": "node-csr-x"}));
    }

    #[test]
    fn a_request_of_ours_is_used_again() {
        let (key, template) = (PrivateKey::generate().expect("a key"), Template::client("n"));
        let request = key.request(&template).expect("a request");
        let signing = |request: &str, signer: &str| {
            let mut signing = CsrObject::default();
            signing.spec.request = STANDARD.encode(request);
            signing.spec.signer_name = signer.to_owned();
            signing
        };
        let signer = template.purpose.signer();
        let other = PrivateKey::generate().expect("a key").request(&template).expect("a request");
        let renamed = key.request(&Template::client("m")).expect("a request");
        // Signatures differ each time; the content of the request does not.
        let again = key.request(&template).expect("a request");
        for (there, expected) in [
            (signing(&again, signer), Ok(())),
            (signing(&other, signer), Err("csr public keys differ".to_owned())),
            (signing(&renamed, signer), Err("csr subjects differ".to_owned())),
            (signing("none", signer), Err("cannot parse certificate signing request".to_owned())),
            (signing(&request, "x"), Err(format!("csr signerNames differ: new {signer:?}, orig: \"x\""))),
        ] {
            assert_eq!(compatible(&there, &request, &template, 0), expected);
        }
    }
}
