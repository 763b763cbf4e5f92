//! Certificate chain with its private key, in PEM. Pure.

use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};

use super::leaf::Leaf;

/// Certificate chain and its private key. Two pairs are equal if their texts are.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// Leaf certificate, then those of its issuers; PEM.
    pub certificate: String,
    /// Private key, PEM: `EC PRIVATE KEY`, `RSA PRIVATE KEY` or `PRIVATE KEY`.
    pub key: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Pair {
    /// Parses certificate and key from one text, as stored in the certificate directory.
    ///
    /// # Errors
    /// A text that names the defect.
    pub fn read(pem: &str) -> Result<Self, String> {
        Self::join(pem, pem)
    }

    /// Parses certificate and key from two texts; other PEM blocks in them are ignored.
    ///
    /// # Errors
    /// A text that names the defect.
    pub fn join(certificate: &str, key: &str) -> Result<Self, String> {
        let pair = Self { certificate: blocks(certificate, is_certificate), key: blocks(key, is_key) };
        pair.check().map(|()| pair)
    }

    /// Encodes the pair as stored in the certificate directory: leaf, issuers, key.
    pub fn text(&self) -> String {
        format!("{}{}", self.certificate, self.key)
    }

    /// Subject, names, and validity of the leaf certificate.
    pub fn leaf(&self) -> Option<Leaf> {
        Leaf::read(&self.certificate)
    }

    /// Checks that certificate and key parse and belong together.
    fn check(&self) -> Result<(), String> {
        let chain: Result<Vec<CertificateDer<'static>>, _> =
            CertificateDer::pem_slice_iter(self.certificate.as_bytes()).collect();
        let chain = chain.map_err(|e| format!("cannot read the certificate: {e}"))?;
        if chain.is_empty() {
            return Err("no certificate found".to_owned());
        }
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).map_err(|_| "no private key found".to_owned())?;
        CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider())
            .map(drop)
            .map_err(|e| format!("the certificate or its key cannot be used: {e}"))?;
        self.leaf().map(drop).ok_or_else(|| "the certificate cannot be read".to_owned())
    }
}

fn is_certificate(label: &str) -> bool {
    label == "CERTIFICATE"
}

fn is_key(label: &str) -> bool {
    label.ends_with("PRIVATE KEY")
}

/// Concatenates the blocks of a PEM text whose label is wanted.
fn blocks(pem: &str, wanted: fn(&str) -> bool) -> String {
    let (mut out, mut within) = (String::new(), false);
    for line in pem.lines().map(str::trim) {
        let label = |mark: &str| line.strip_prefix(mark).and_then(|rest| rest.strip_suffix("-----"));
        if let Some(label) = label("-----BEGIN ") {
            within = wanted(label);
        }
        if within {
            out.extend([line, "\n"]);
        }
        if label("-----END ").is_some() {
            within = false;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::{
        key::PrivateKey,
        template::Template,
        testing::{Authority, DAY},
    };

    #[test]
    fn a_pair_is_read_from_one_text() {
        let (authority, key) = (Authority::new(), PrivateKey::generate().expect("a key"));
        let request = key.request(&Template::client("n")).expect("a request");
        let certificate = authority.sign(&request, 0, DAY);
        let text = format!("# a comment\n{certificate}{}{}", authority.pem(), key.to_pem());
        let pair = Pair::read(&text).expect("a pair");
        assert_eq!(pair.certificate, format!("{certificate}{}", authority.pem()));
        assert_eq!(pair.text(), text.replace("# a comment\n", ""));
        assert_eq!(pair.leaf().expect("a leaf").common_name, "system:node:n");
        assert!(!format!("{pair:?}").contains("PRIVATE"), "keys are not logged");

        let other = PrivateKey::generate().expect("a key").to_pem();
        for (certificate, key, cause) in [
            (certificate.as_str(), other.as_str(), "the certificate or its key cannot be used: "),
            ("", &other, "no certificate found"),
            (&certificate, "", "no private key found"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &other, "the certificate or its key"),
            ("-----BEGIN CERTIFICATE-----\n%\n-----END CERTIFICATE-----\n", &other, "cannot read the certificate: "),
        ] {
            let error = Pair::join(certificate, key).expect_err("no pair");
            assert!(error.starts_with(cause), "{error}");
        }
    }
}
