//! TLS handshake: client certificates, ALPN, resumption, versions, and start-up errors.

use berth_server::tls::{Tls, TlsSettings};
use rustls::{
    HandshakeKind,
    version::{TLS12, TLS13},
};

use crate::server_auth::client::{Client, Server, authority, serving, valid};

#[tokio::test]
async fn any_certificate_is_taken_if_the_client_holds_its_key() {
    // Spec 04 §6.1: a client certificate is never rejected in the handshake; AC-04-18 needs this.
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let mut server = Server::start(&serving(&ours), Some(&ours.own().certificate), |_| {}).await;
    let known = ours.client("kate", &[], valid()).expect("a certificate");
    let unknown = theirs.client("mallory", &[], valid()).expect("a certificate");
    for (client, shown) in [
        (Client::new(&ours), 0),
        (Client::new(&ours).showing(&known.certificate, &known.key), 1),
        (Client::new(&ours).showing(&unknown.certificate, &unknown.key), 1),
        (Client::with_versions(&ours, &[&TLS12]).showing(&unknown.certificate, &unknown.key), 1),
    ] {
        client.connect(&server).await.expect("connected");
        assert_eq!(server.seen.recv().await.expect("seen").chain.len(), shown);
    }
    for versions in [&[&TLS12][..], &[&TLS13]] {
        let thief = Client::with_versions(&ours, versions).showing(&known.certificate, &unknown.key);
        assert!(thief.connect(&server).await.is_err(), "a certificate without its key is nothing");
    }
}

#[tokio::test]
async fn without_a_bundle_no_client_certificate_is_requested() {
    let ours = authority("ours");
    let mut server = Server::start(&serving(&ours), None, |_| {}).await;
    let kate = ours.client("kate", &[], valid()).expect("a certificate");
    Client::new(&ours).showing(&kate.certificate, &kate.key).connect(&server).await.expect("connected");
    assert!(server.seen.recv().await.expect("seen").chain.is_empty());
}

#[tokio::test]
async fn http_2_is_always_offered() {
    let ours = authority("ours");
    let mut server = Server::start(&serving(&ours), Some(&ours.own().certificate), |_| {}).await;
    for (speaks, chosen) in [(&["h2", "http/1.1"][..], Some("h2")), (&["http/1.1"], Some("http/1.1")), (&[], None)] {
        Client::new(&ours).speaking(speaks).connect(&server).await.expect("connected");
        let alpn = server.seen.recv().await.expect("seen").alpn;
        assert_eq!(alpn.as_deref(), chosen.map(str::as_bytes), "{speaks:?}");
    }
}

#[tokio::test]
async fn a_resumed_session_still_knows_the_clients_certificate() {
    let ours = authority("ours");
    let mut server = Server::start(&serving(&ours), Some(&ours.own().certificate), |_| {}).await;
    let kate = ours.client("kate", &[], valid()).expect("a certificate");
    for versions in [&[&TLS12][..], &[&TLS13]] {
        let client = Client::with_versions(&ours, versions).showing(&kate.certificate, &kate.key);
        for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
            assert_eq!(client.connect(&server).await.expect("connected"), kind);
            assert_eq!(server.seen.recv().await.expect("seen").chain.len(), 1, "{kind:?}");
        }
    }
}

#[tokio::test]
async fn the_least_version_is_kept() {
    let ours = authority("ours");
    for (least, old, new) in [("VersionTLS13", false, true), ("VersionTLS12", true, true), ("VersionTLS10", true, true)]
    {
        let server = Server::start(&serving(&ours), None, |settings| settings.min_version = least.to_owned()).await;
        for (version, expected) in [(&TLS12, old), (&TLS13, new)] {
            let connected = Client::with_versions(&ours, &[version]).connect(&server).await;
            assert_eq!(connected.is_ok(), expected, "{least} {version:?}");
        }
        assert!(server.tls.cipher_suites().len() >= 3);
    }
}

#[tokio::test]
async fn what_cannot_be_served_with_stops_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (one, two) = (serving(&authority("one")), serving(&authority("two")));
    let write = |name: &str, text: &str| std::fs::write(path(name), text).expect("written");
    write("cert", &one.certificate);
    write("key", &one.key);
    write("other", &two.key);
    write("empty", "");
    write("garbage", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let manager = "failed to initialize file based certificate manager: ";
    for (cert, key, ca, expected) in [
        ("cert", "other", None, format!("{manager}tls: private key does not match public key")),
        ("empty", "key", None, format!("{manager}tls: failed to find any PEM data in certificate input")),
        ("cert", "empty", None, format!("{manager}tls: failed to find any PEM data in key input")),
        ("missing", "key", None, format!("{manager}open {}", path("missing").display())),
        ("garbage", "key", None, format!("{manager}tls: ")),
        ("cert", "key", Some("missing"), format!("unable to load client CA file {}: open ", path("missing").display())),
        (
            "cert",
            "key",
            Some("empty"),
            format!(
                "unable to load client CA file {}: data does not contain any valid RSA or ECDSA certificates",
                path("empty").display()
            ),
        ),
        (
            "cert",
            "key",
            Some("garbage"),
            format!("unable to load client CA file {}: failed to parse certificate 1", path("garbage").display()),
        ),
    ] {
        let settings = TlsSettings {
            cert_file: path(cert),
            key_file: path(key),
            client_ca_file: ca.map(path),
            ..TlsSettings::default()
        };
        let error = Tls::new(settings).await.map(drop).expect_err(&expected).to_string();
        assert!(error.starts_with(&expected), "{error}");
    }
}
