//! Tests of `ServerVerifier` and `verify_pinned` with certificates made by openssl: what Go accepts is accepted.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use rustls::{ClientConfig, pki_types::pem::PemObject};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

use super::*;

/// IP address that every certificate here is valid for.
const ADDRESS: &str = "127.0.0.1";
const KINDS: [(&str, &[&str]); 6] = [
    ("rsa", &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"]),
    ("p256", &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]),
    ("p384", &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"]),
    ("p521", &["EC", "-pkeyopt", "ec_paramgen_curve:P-521"]),
    ("ed25519", &["ED25519"]),
    ("rsa4096", &["RSA", "-pkeyopt", "rsa_keygen_bits:4096"]),
];
const DIGESTS: [&str; 3] = ["-sha256", "-sha384", "-sha512"];
const AUTHORITY: &str = "basicConstraints=critical,CA:TRUE";
const LEAF: &str = "basicConstraints=CA:FALSE\nsubjectAltName=IP:127.0.0.1";

struct Workshop(tempfile::TempDir);

impl Workshop {
    fn new() -> Self {
        let made = Self(tempfile::tempdir().expect("a directory"));
        for (kind, arguments) in KINDS {
            made.openssl(&[&["genpkey", "-out", &format!("{kind}.key"), "-algorithm"], arguments].concat());
        }
        made
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn openssl(&self, arguments: &[&str]) {
        let output = Command::new("openssl").args(arguments).current_dir(self.0.path()).output();
        let output = output.expect("openssl is installed");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A self-signed certificate with these extensions beside the address.
    fn self_signed(&self, kind: &str, digest: &str, extensions: &[&str]) -> CertificateDer<'static> {
        let key = format!("{kind}.key");
        let mut arguments = vec!["req", "-x509", "-key", &key, "-out", "self.pem", "-subj", "/CN=self", digest];
        let names = format!("subjectAltName=IP:{ADDRESS}");
        for extension in [names.as_str()].iter().chain(extensions) {
            arguments.extend(["-addext", extension]);
        }
        self.openssl(&arguments);
        self.read("self.pem")
    }

    /// A certificate of that key type, signed by another key.
    fn signed(
        &self,
        name: &str,
        kind: &str,
        by: (&str, &str),
        digest: &str,
        extensions: &str,
    ) -> CertificateDer<'static> {
        let (request, out) = (format!("{name}.csr"), format!("{name}.pem"));
        std::fs::write(self.at("extensions"), extensions).expect("written");
        self.openssl(&[
            "req",
            "-new",
            "-key",
            &format!("{kind}.key"),
            "-subj",
            &format!("/CN={name}"),
            "-out",
            &request,
        ]);
        let (authority, key) = (format!("{}.pem", by.0), format!("{}.key", by.1));
        let signing =
            ["x509", "-req", "-in", &request, "-CA", &authority, "-CAkey", &key, "-CAcreateserial", "-out", &out];
        self.openssl(&[&signing[..], &["-extfile", "extensions", "-days", "2", digest]].concat());
        self.read(&out)
    }

    fn read(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.at(name)).expect("a certificate")
    }
}

fn verdict(
    known: &CertificateDer<'static>,
    leaf: &CertificateDer<'static>,
    intermediates: &[CertificateDer<'static>],
) -> Result<(), Error> {
    let verifier = ServerVerifier::new(RootCertStore::empty(), [known.clone()]).expect("an authority");
    let name = ServerName::try_from(ADDRESS).expect("an address");
    verifier.verify_server_cert(leaf, intermediates, &name, &[], UnixTime::now()).map(drop)
}

#[test]
fn every_kind_of_key_signature_and_chain_that_go_believes_is_believed() {
    let shop = Workshop::new();
    for (kind, _) in KINDS {
        for digest in DIGESTS {
            let case = format!("{kind} {digest}");
            let own = shop.self_signed(kind, digest, &[]);
            assert_eq!(verdict(&own, &own, &[]), Ok(()), "{case}: an authority's own certificate (CA:TRUE)");
            std::fs::rename(shop.at("self.pem"), shop.at("ca.pem")).expect("renamed");
            let leaf = shop.signed("leaf", kind, ("ca", kind), digest, LEAF);
            assert_eq!(verdict(&own, &leaf, &[]), Ok(()), "{case}: signed by an authority");
            assert_eq!(verdict(&leaf, &leaf, &[]), Ok(()), "{case}: the server's own is the only one known");
            let between = shop.signed("between", kind, ("ca", kind), digest, AUTHORITY);
            let leaf = shop.signed("leaf", kind, ("between", kind), digest, LEAF);
            assert_eq!(verdict(&own, &leaf, std::slice::from_ref(&between)), Ok(()), "{case}: by one between");
            assert_eq!(verdict(&between, &leaf, &[]), Ok(()), "{case}: the one between is all that is known");
        }
    }
}

#[test]
fn a_certificate_that_is_known_must_still_hold() {
    let shop = Workshop::new();
    let other = shop.self_signed("p384", "-sha256", &[]);
    let own = shop.self_signed("p256", "-sha256", &[]);
    let invalid = |error| Err(Error::InvalidCertificate(error));
    assert!(verdict(&other, &own, &[]).is_err(), "an unknown certificate is refused");
    let name = ServerName::try_from("elsewhere").expect("a name");
    let verifier = ServerVerifier::new(RootCertStore::empty(), [own.clone()]).expect("an authority");
    let result = verifier.verify_server_cert(&own, &[], &name, &[], UnixTime::now()).map(drop);
    assert!(
        matches!(result, Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { .. }))),
        "{result:?}"
    );
    let day = Duration::from_secs(86400);
    let now = Duration::from_secs(UnixTime::now().as_secs());
    for (at, error) in [(now - day, CertificateError::NotValidYet), (now + 40 * day, CertificateError::Expired)] {
        assert_eq!(verify_pinned(&own, Use::Server, UnixTime::since_unix_epoch(at)), invalid(error));
    }
    for (usage, server, client) in [
        ("extendedKeyUsage=clientAuth", false, true),
        ("extendedKeyUsage=serverAuth", true, false),
        ("extendedKeyUsage=serverAuth,clientAuth", true, true),
        ("extendedKeyUsage=anyExtendedKeyUsage", true, true),
        ("extendedKeyUsage=codeSigning", false, false),
        ("keyUsage=digitalSignature", true, true),
    ] {
        let certificate = shop.self_signed("p256", "-sha256", &[usage]);
        let is_believed = |shown_for| verify_pinned(&certificate, shown_for, UnixTime::now()).is_ok();
        assert_eq!((is_believed(Use::Server), is_believed(Use::Client)), (server, client), "{usage}");
    }
}

/// An `openssl s_server` process and its address.
struct Server(Child, u16);

impl Server {
    fn start(directory: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("openssl");
        command.args(["s_server", "-accept", "0", "-naccept", "1"]).args(arguments).current_dir(directory);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("there");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let port = lines.find_map(|line| line.ok()?.strip_prefix("ACCEPT ")?.rsplit_once(':')?.1.parse().ok());
        Self(child, port.expect("it says where it listens"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn servers_complete_tls_handshakes_with_every_kind_of_key() {
    let shop = Workshop::new();
    for (kind, _) in KINDS {
        let own = shop.self_signed(kind, "-sha256", &[]);
        for version in ["-tls1_2", "-tls1_3"] {
            // Before TLS 1.3 the curve of a certificate must be one for key exchange, and this key exchange does not
            // exist here.
            if (kind, version) == ("p521", "-tls1_2") {
                continue;
            }
            let server = Server::start(shop.0.path(), &["-cert", "self.pem", "-key", &format!("{kind}.key"), version]);
            let verifier = ServerVerifier::new(RootCertStore::empty(), [own.clone()]).expect("an authority");
            let config = ClientConfig::builder_with_provider(Arc::new(provider()))
                .with_safe_default_protocol_versions()
                .expect("versions")
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth();
            let stream = TcpStream::connect((ADDRESS, server.1)).await.expect("it listens");
            let name = ServerName::try_from(ADDRESS).expect("an address");
            let shaken = timeout(Duration::from_secs(10), TlsConnector::from(Arc::new(config)).connect(name, stream));
            shaken.await.expect("in time").unwrap_or_else(|error| panic!("{kind} {version}: {error}"));
        }
    }
}
