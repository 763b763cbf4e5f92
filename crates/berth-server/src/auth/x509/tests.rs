//! X.509 authentication with generated certificates: valid, expired, other CAs and uses, odd names.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use super::*;

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// 2026-01-01.
const NOW: i64 = 1_767_225_600;
const DAY: i64 = 86_400;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

fn params(attributes: &[(DnType, &str)], days: (i64, i64)) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let day = |days: i64| {
        let seconds = u64::try_from(NOW + days * DAY).expect("after 1970");
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    (params.not_before, params.not_after) = (day(days.0), day(days.1));
    for (kind, text) in attributes {
        params.distinguished_name.push(kind.clone(), *text);
    }
    params
}

fn ca_params(name: &str, days: (i64, i64)) -> CertificateParams {
    let mut params = params(&[(DnType::CommonName, name)], days);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn ca(name: &str, days: (i64, i64)) -> Issuer {
    CertifiedIssuer::self_signed(ca_params(name, days), KeyPair::generate().expect("a key")).expect("an authority")
}

fn client(
    issuer: &Issuer,
    attributes: &[(DnType, &str)],
    days: (i64, i64),
    usage: ExtendedKeyUsagePurpose,
) -> CertificateDer<'static> {
    let mut params = params(attributes, days);
    params.extended_key_usages = vec![usage];
    params.signed_by(&KeyPair::generate().expect("a key"), issuer).expect("a certificate").into()
}

fn bundle(issuers: &[&Issuer]) -> ClientCas {
    let pem: String = issuers.iter().map(|issuer| issuer.pem()).collect();
    ClientCas::from_pem(pem.as_bytes()).expect("a bundle")
}

fn uid() -> DnType {
    DnType::from_oid(&[1, 3, 6, 1, 4, 1, 57683, 2])
}

const KATE: &[(DnType, &str)] = &[(DnType::CommonName, "kate")];

#[test]
fn a_good_certificate_names_its_holder() {
    let ca = ca("us", (-1, 100));
    let names = [(DnType::CommonName, "kate"), (DnType::OrganizationName, "dev"), (uid(), "u-1")];
    let certificate = client(&ca, &names, (-1, 10), ExtendedKeyUsagePurpose::ClientAuth);
    let id = format!("X509SHA256={}", hex::encode(Sha256::digest(&certificate)));
    let proof =
        identify(std::slice::from_ref(&certificate), &bundle(&[&ca]), at(NOW)).expect("good").expect("somebody");
    let identity = proof.identity;
    assert_eq!((identity.name.as_str(), identity.uid.as_str(), identity.via), ("kate", "u-1", AuthenticatedBy::X509));
    assert_eq!(identity.groups, ["dev"]);
    assert_eq!(identity.extra, BTreeMap::from([(CREDENTIAL_ID.to_owned(), vec![id])]));
    assert_eq!(proof.expires, at(NOW + 10 * DAY + 1));
    assert_eq!(seconds_left(&certificate, at(NOW)), Some(10 * DAY));
}

#[test]
fn what_is_no_proof_is_refused() {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let (ours, theirs, old) = (ca("us", (-9, 100)), ca("them", (-9, 100)), ca("old", (-9, -1)));
    let same_name = ca("us", (-9, 100));
    let cas = bundle(&[&ours, &old]);
    for (certificate, what) in [
        (client(&ours, KATE, (-9, -1), ClientAuth), "expired"),
        (client(&ours, KATE, (1, 9), ClientAuth), "not yet valid"),
        (client(&theirs, KATE, (-1, 9), ClientAuth), "of an authority we do not know"),
        (client(&same_name, KATE, (-1, 9), ClientAuth), "of an authority that calls itself like ours"),
        (client(&ours, KATE, (-1, 9), ServerAuth), "for servers"),
        (client(&old, KATE, (-9, 9), ClientAuth), "of an authority that has expired"),
    ] {
        let refused = identify(&[certificate], &cas, at(NOW));
        assert!(matches!(refused, Err(X509Error::Unverified(_))), "{what}: {refused:?}");
    }
    let garbage = CertificateDer::from(b"\x30\x03abc".to_vec());
    assert_eq!(identify(&[garbage], &cas, at(NOW)), Err(X509Error::Unreadable));
    assert_eq!(identify(&[], &cas, at(NOW)), Ok(None));
    assert_eq!(
        identify(&[client(&old, KATE, (-9, 9), ClientAuth)], &bundle(&[&old]), at(NOW)),
        Err(X509Error::Unverified("all client CA certificates have expired".to_owned()))
    );
    let then = at(NOW - 2 * DAY);
    let valid_then = client(&old, KATE, (-9, 9), ClientAuth);
    assert!(identify(&[valid_then], &cas, then).is_ok_and(|proof| proof.is_some()));
}

#[test]
fn an_authority_proves_itself() {
    // As in kubelet: one self-signed certificate (CA:TRUE) is both the bundle and the client certificate.
    let identified = |days, now: i64| {
        let own = ca("me", days);
        let leaf: CertificateDer<'static> = own.der().clone();
        identify(&[leaf], &bundle(&[&own]), at(NOW + now * DAY)).map(|proof| proof.expect("a name").identity.name)
    };
    assert_eq!(identified((-1, 10), 0).as_deref(), Ok("me"));
    assert!(identified((-1, 10), 11).is_err() && identified((1, 10), 0).is_err());
    let (own, other) = (ca("me", (-1, 10)), ca("me", (-1, 10)));
    assert!(identify(&[other.der().clone()], &bundle(&[&own]), at(NOW)).is_err(), "of that name, but another");
}

#[test]
fn names_are_read_as_the_reference_reads_them() {
    let ca = ca("us", (-1, 100));
    let cas = bundle(&[&ca]);
    let read = |attributes: &[(DnType, &str)]| {
        let certificate = client(&ca, attributes, (-1, 10), ExtendedKeyUsagePurpose::ClientAuth);
        identify(&[certificate], &cas, at(NOW)).map(|proof| proof.map(|p| (p.identity.name, p.identity.groups)))
    };
    let expected =
        |groups: &[&str]| Ok(Some(("kate".to_owned(), groups.iter().map(|g| (*g).to_owned()).collect::<Vec<_>>())));
    assert_eq!(read(KATE), expected(&[]));
    assert_eq!(read(&[(DnType::OrganizationName, "dev"), (DnType::CommonName, "kate")]), expected(&["dev"]));
    assert_eq!(read(&[(DnType::OrganizationName, "dev")]), Ok(None), "a group alone is no identity");
    assert_eq!(read(&[(DnType::CommonName, "")]), Ok(None));
    assert_eq!(read(&[(DnType::CommonName, "kate"), (uid(), "")]), Err(X509Error::Uid(1)));
}

#[test]
fn intermediates_the_client_sends_are_used() {
    let root = ca("root", (-1, 100));
    let key = KeyPair::generate().expect("a key");
    let middle = CertifiedIssuer::signed_by(ca_params("middle", (-1, 5)), key, &root).expect("an authority");
    let certificate = client(&middle, KATE, (-1, 10), ExtendedKeyUsagePurpose::ClientAuth);
    let cas = bundle(&[&root]);
    assert!(identify(std::slice::from_ref(&certificate), &cas, at(NOW)).is_err());
    let proof = identify(&[certificate, middle.der().clone()], &cas, at(NOW)).expect("good").expect("somebody");
    assert_eq!(proof.expires, at(NOW + 5 * DAY + 1), "the proof ends with what ends first");
}

#[test]
fn a_bundle_is_taken_as_a_whole_or_not_at_all() {
    let ca = ca("us", (-1, 100));
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let message = "data does not contain any valid RSA or ECDSA certificates";
    assert_eq!(ClientCas::from_pem(b"").expect_err("empty").to_string(), message);
    assert_eq!(ClientCas::from_pem(b"nothing of that kind\n").expect_err("empty").to_string(), message);
    let error = ClientCas::from_pem(format!("{}{broken}", ca.pem()).as_bytes()).expect_err("broken");
    assert!(error.to_string().starts_with("failed to parse certificate 2: "), "{error}");
    assert_eq!(bundle(&[&ca, &ca]).subjects().len(), 2);
}
