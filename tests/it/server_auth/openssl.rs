//! TLS as seen by an independent client: `openssl s_client`.

use std::process::Stdio;

use tokio::process::Command;

use crate::server_auth::client::{Client, Server, authority, replace, serving, valid};

/// Output of `openssl s_client` with these arguments; `None` if the handshake failed.
async fn openssl(server: &Server, args: &[&str]) -> Option<String> {
    let mut command = Command::new("openssl");
    command.args(["s_client", "-connect", &server.address.to_string()]).args(args).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = command.output().await.expect("openssl is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_shaken = output.status.success() && text.contains("Cipher is TLS_") || text.contains("Cipher is ECDHE");
    is_shaken.then_some(text)
}

#[tokio::test]
async fn versions_suites_and_protocols() {
    let ours = authority("ours");
    let server = Server::start(&serving(&ours), Some(&ours.own().certificate), |_| {}).await;
    // Weak suites need openssl's lowest security level: it would not offer them otherwise.
    for (args, expected) in [
        (&["-tls1_3"][..], Some("TLSv1.3")),
        (&["-tls1_2"], Some("TLSv1.2")),
        (&["-tls1_1", "-cipher", "ALL:@SECLEVEL=0"], None),
        (&["-tls1", "-cipher", "ALL:@SECLEVEL=0"], None),
        (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"], Some("ECDHE-ECDSA-AES128-GCM-SHA256")),
        (&["-tls1_2", "-cipher", "ECDHE-ECDSA-CHACHA20-POLY1305"], Some("ECDHE-ECDSA-CHACHA20-POLY1305")),
        (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA:AES128-SHA:@SECLEVEL=0"], None),
        (&["-tls1_2", "-cipher", "AES128-GCM-SHA256:@SECLEVEL=0"], None),
        (&["-tls1_3", "-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256"], Some("TLS_CHACHA20_POLY1305_SHA256")),
        (&["-alpn", "h2,http/1.1"], Some("ALPN protocol: h2")),
        (&["-alpn", "http/1.1"], Some("ALPN protocol: http/1.1")),
        (&["-servername", "node.example"], Some("CN = node")),
        (&["-noservername"], Some("CN = node")),
        (&[], Some("CN = ours")), // the server names its client CAs
        (&["-groups", "X25519"], Some("X25519")),
        (&["-groups", "P-521"], None),
    ] {
        let output = openssl(&server, args).await;
        match expected {
            None => assert!(output.is_none(), "{args:?}: {output:?}"),
            Some(text) => {
                let output = output.unwrap_or_else(|| panic!("{args:?}: no handshake"));
                assert!(output.replace("CN=", "CN = ").contains(text), "{args:?}: {output}");
            }
        }
    }
}

#[tokio::test]
async fn settings_narrow_what_is_offered() {
    let ours = authority("ours");
    let new = Server::start(&serving(&ours), None, |s| s.min_version = "VersionTLS13".to_owned()).await;
    assert!(openssl(&new, &["-tls1_2"]).await.is_none() && openssl(&new, &["-tls1_3"]).await.is_some());
    let one = ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_RSA_WITH_RC4_128_SHA"];
    let one = Server::start(&serving(&ours), None, |s| s.cipher_suites = one.map(str::to_owned).to_vec()).await;
    let output = openssl(&one, &["-tls1_2"]).await.expect("a handshake");
    assert!(output.contains("ECDHE-ECDSA-AES256-GCM-SHA384"), "{output}");
    assert!(openssl(&one, &["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"]).await.is_none());
    let curve = Server::start(&serving(&ours), None, |s| s.curves = vec![24]).await;
    assert!(openssl(&curve, &["-groups", "P-384"]).await.is_some());
    assert!(openssl(&curve, &["-groups", "X25519"]).await.is_none());
}

#[tokio::test]
async fn sessions_are_resumed_until_files_change() {
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let mut server = Server::start(&serving(&ours), Some(&ours.own().certificate), |_| {}).await;
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("session").display().to_string();
    for version in ["-tls1_2", "-tls1_3"] {
        openssl(&server, &[version, "-ign_eof", "-sess_out", &session]).await.expect("a handshake");
        let output = openssl(&server, &[version, "-ign_eof", "-sess_in", &session]).await.expect("a handshake");
        assert!(output.contains("Reused, TLSv1"), "{version}: {output}");
    }
    // A ticket contains the client's certificate: it is void under another client CA bundle.
    let kate = ours.client("kate", &[], valid()).expect("a certificate");
    let client = Client::new(&ours).showing(&kate.certificate, &kate.key);
    for kind in [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed] {
        assert_eq!(client.connect(&server).await.expect("connected"), kind);
    }
    let roots = server.tls.client_roots();
    let before = roots.load_full().expect("a bundle");
    replace(&server.path("ca.crt"), &theirs.own().certificate);
    let changed = async {
        while std::sync::Arc::ptr_eq(&before, &roots.load_full().expect("a bundle")) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), changed).await.expect("the bundle counts");
    assert_eq!(client.connect(&server).await.expect("connected"), rustls::HandshakeKind::Full);
    while let Ok(seen) = server.seen.try_recv() {
        assert!(seen.chain.len() <= 1);
    }
    let output = openssl(&server, &["-tls1_3", "-ign_eof", "-sess_in", &session]).await.expect("a handshake");
    assert!(!output.contains("Reused, TLSv1"), "{output}");
}
