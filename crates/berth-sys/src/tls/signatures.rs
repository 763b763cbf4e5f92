//! Signature algorithms that Go verifies and `ring` does not: more ECDSA curves and hashes.
//!
//! For certificates and handshakes: ECDSA with SHA-512 on P-256 and P-384, and all of P-521, verified by the curve
//! crates of the RustCrypto project.

use std::sync::LazyLock;

use p256::ecdsa::signature::hazmat::PrehashVerifier;
use rustls::{
    SignatureScheme,
    crypto::{WebPkiSupportedAlgorithms, ring},
    pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, alg_id},
};
use sha2::{Digest, Sha256, Sha384, Sha512};

/// Size of a P-521 scalar, bytes: shorter digests are padded with zeros, which the crate does not do.
const P521_BYTES: usize = 66;

/// All supported algorithms: those of `ring` and the additional ones.
pub fn all() -> WebPkiSupportedAlgorithms {
    static ALL: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| {
        let known = ring::default_provider().signature_verification_algorithms;
        let mut mapping = known.mapping.to_vec();
        mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, &WITH_SHA512));
        let all = [known.all, &MORE].concat();
        // Leaked once for the lifetime of the program.
        WebPkiSupportedAlgorithms { all: all.leak(), mapping: mapping.leak() }
    });
    *ALL
}

/// Algorithms of a handshake: TLS 1.3 uses only the first one, earlier versions the curve of the certificate.
static WITH_SHA512: [&dyn SignatureVerificationAlgorithm; 3] = [
    &Ecdsa { curve: Curve::P521, hash: Hash::Sha512 },
    &Ecdsa { curve: Curve::P384, hash: Hash::Sha512 },
    &Ecdsa { curve: Curve::P256, hash: Hash::Sha512 },
];

static MORE: [&dyn SignatureVerificationAlgorithm; 5] = [
    &Ecdsa { curve: Curve::P521, hash: Hash::Sha512 },
    &Ecdsa { curve: Curve::P521, hash: Hash::Sha384 },
    &Ecdsa { curve: Curve::P521, hash: Hash::Sha256 },
    &Ecdsa { curve: Curve::P384, hash: Hash::Sha512 },
    &Ecdsa { curve: Curve::P256, hash: Hash::Sha512 },
];

#[derive(Clone, Copy, Debug)]
enum Curve {
    P256,
    P384,
    P521,
}

#[derive(Clone, Copy, Debug)]
enum Hash {
    Sha256,
    Sha384,
    Sha512,
}

impl Hash {
    fn of(self, message: &[u8]) -> Vec<u8> {
        match self {
            Self::Sha256 => Sha256::digest(message).to_vec(),
            Self::Sha384 => Sha384::digest(message).to_vec(),
            Self::Sha512 => Sha512::digest(message).to_vec(),
        }
    }
}

#[derive(Debug)]
struct Ecdsa {
    curve: Curve,
    hash: Hash,
}

impl Ecdsa {
    fn verify(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), p256::ecdsa::Error> {
        let digest = self.hash.of(message);
        match self.curve {
            Curve::P256 => {
                let signature = p256::ecdsa::Signature::from_der(signature)?;
                p256::ecdsa::VerifyingKey::from_sec1_bytes(key)?.verify_prehash(&digest, &signature)
            }
            Curve::P384 => {
                let signature = p384::ecdsa::Signature::from_der(signature)?;
                p384::ecdsa::VerifyingKey::from_sec1_bytes(key)?.verify_prehash(&digest, &signature)
            }
            Curve::P521 => {
                let signature = p521::ecdsa::Signature::from_der(signature)?;
                let filled = [vec![0; P521_BYTES - digest.len()], digest].concat();
                p521::ecdsa::VerifyingKey::from_sec1_bytes(key)?.verify_prehash(&filled, &signature)
            }
        }
    }
}

impl SignatureVerificationAlgorithm for Ecdsa {
    fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
        self.verify(key, message, signature).map_err(|_| InvalidSignature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        match self.curve {
            Curve::P256 => alg_id::ECDSA_P256,
            Curve::P384 => alg_id::ECDSA_P384,
            Curve::P521 => alg_id::ECDSA_P521,
        }
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        match self.hash {
            Hash::Sha256 => alg_id::ECDSA_SHA256,
            Hash::Sha384 => alg_id::ECDSA_SHA384,
            Hash::Sha512 => alg_id::ECDSA_SHA512,
        }
    }
}
