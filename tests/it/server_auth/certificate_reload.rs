//! Reload of serving certificates and the client CA bundle while the agent runs.

use std::time::Duration;

use berth::certificates::{Authority, CertificatePairPaths};
use berth_server::auth::ClientRoots;

use crate::server_auth::client::{Client, Server, authority, replace, serving};

/// Subject names of the client CAs.
fn named(roots: &ClientRoots) -> Vec<Vec<u8>> {
    let cas = roots.load_full().expect("a bundle");
    cas.subjects().iter().map(|name| name.as_ref().to_vec()).collect()
}

/// Timeout of a reload by file notification.
const SOON: Duration = Duration::from_secs(20);

/// Waits until the served certificate is of that CA.
async fn until_served(server: &Server, by: &Authority) {
    let serving = async {
        while Client::new(by).connect(server).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, serving).await.expect("the new certificate is served soon");
}

/// Waits until the server has reread its files: a new CA bundle is in effect, and all files are read together.
async fn until_read_again(server: &Server) {
    let (roots, before) = (server.tls.client_roots(), named(&server.tls.client_roots()));
    replace(
        &server.path("ca.crt"),
        &authority(&format!("clients of {}", jiff::Timestamp::now().as_nanosecond())).own().certificate,
    );
    let changed = async {
        while named(&roots) == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, changed).await.expect("the new bundle counts soon");
}

#[tokio::test]
async fn a_new_pair_is_served_and_a_bad_one_is_not() {
    // AC-04-21
    let (first, second, third) = (authority("first"), authority("second"), authority("third"));
    let server = Server::start(&serving(&first), Some(&authority("clients").own().certificate), |_| {}).await;
    let files = CertificatePairPaths::of(server.folder.path(), "serving");
    until_served(&server, &first).await;

    let new = serving(&second);
    replace(&files.key, &new.key);
    until_read_again(&server).await;
    Client::new(&first).connect(&server).await.expect("a key without its certificate changes nothing");
    replace(&files.certificate, &new.certificate);
    until_served(&server, &second).await;

    for bad in ["", "garbage", new.key.as_str()] {
        replace(&files.certificate, bad);
    }
    std::fs::remove_file(&files.key).expect("removed");
    until_read_again(&server).await;
    Client::new(&second).connect(&server).await.expect("the old one is served");
    files.write(&serving(&third)).expect("written");
    until_served(&server, &third).await;
}

#[tokio::test]
async fn a_pair_may_be_kept_for_ever() {
    // Feature gate ReloadKubeletServerCertificateFile off; the bundle is reloaded all the same.
    let (first, second) = (authority("first"), authority("second"));
    let server =
        Server::start(&serving(&first), Some(&first.own().certificate), |settings| settings.keeps_pair = true).await;
    let roots = server.tls.client_roots();
    let before = named(&roots);
    CertificatePairPaths::of(server.folder.path(), "serving").write(&serving(&second)).expect("written");
    replace(&server.path("ca.crt"), &second.own().certificate);
    let changed = async {
        while named(&roots) == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, changed).await.expect("the new bundle counts soon");
    Client::new(&first).connect(&server).await.expect("the first pair is served");
}

#[tokio::test]
async fn a_new_bundle_counts_without_a_restart() {
    // AC-04-20; certificates mounted into a pod change by an atomic switch of a symlink to another directory.
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let server = Server::start(&serving(&ours), Some(&ours.own().certificate), |settings| {
        let folder = settings.cert_file.parent().expect("a folder").to_owned();
        std::fs::create_dir(folder.join("..1")).expect("made");
        std::fs::write(folder.join("..1/bundle"), &ours.own().certificate).expect("written");
        std::os::unix::fs::symlink("..1", folder.join("..data")).expect("linked");
        std::os::unix::fs::symlink("..data/bundle", folder.join("bundle")).expect("linked");
        settings.client_ca_file = Some(folder.join("bundle"));
    })
    .await;
    let roots = server.tls.client_roots();
    let before = named(&roots);

    std::fs::create_dir(server.path("..2")).expect("made");
    std::fs::write(server.path("..2/bundle"), &theirs.own().certificate).expect("written");
    std::os::unix::fs::symlink("..2", server.path("..tmp")).expect("linked");
    std::fs::rename(server.path("..tmp"), server.path("..data")).expect("turned");
    let changed = async {
        while named(&roots) == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, changed).await.expect("the new bundle counts soon");

    let good = named(&roots);
    std::fs::write(server.path("..2/bundle"), "").expect("written");
    replace(&server.path("bundle"), "garbage");
    // All files are read together: once the new pair is served, the bundle has been read, too.
    let other = authority("other");
    CertificatePairPaths::of(server.folder.path(), "serving").write(&serving(&other)).expect("written");
    until_served(&server, &other).await;
    assert_eq!(named(&roots), good);
}

#[tokio::test]
async fn a_pair_that_the_cluster_signs_may_come_later() {
    let first = authority("first");
    let server = Server::start(&serving(&first), Some(&authority("clients").own().certificate), |settings| {
        let later = settings.cert_file.with_file_name("kubelet-server-current.pem");
        (settings.cert_file, settings.key_file, settings.awaits_pair) = (later.clone(), later, true);
    })
    .await;
    assert!(Client::new(&first).connect(&server).await.is_err(), "there is nothing to serve with");
    // Layout of the certificate store: certificate and key in one file, behind a symlink.
    let issued = serving(&first);
    let dated = server.path("kubelet-server-2026-01-31-12-00-00.pem");
    std::fs::write(&dated, format!("{}{}", issued.certificate, issued.key)).expect("written");
    let (updated, link) = (server.path("kubelet-server-updated.pem"), server.path("kubelet-server-current.pem"));
    std::os::unix::fs::symlink(&dated, &updated).expect("linked");
    std::fs::rename(&updated, &link).expect("renamed");
    until_served(&server, &first).await;
    std::fs::remove_file(&link).expect("removed");
    until_read_again(&server).await;
    Client::new(&first).connect(&server).await.expect("what was served once is served on");
}
