//! Credential hashes stored in pull records instead of the credentials (spec 03b §2.2). Pure.

use sha2::{Digest, Sha256};

use super::docker::Login;

/// Lower-case hex SHA-256 of the login's JSON with upstream's field names; empty fields are omitted.
pub fn credential_hash(login: &Login) -> String {
    let fields = [("username", &login.username), ("password", &login.password), ("email", &login.email)];
    let parts: Vec<String> = fields
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("\"{name}\":{}", quoted(value)))
        .collect();
    hex::encode(Sha256::digest(format!("{{{}}}", parts.join(","))))
}

/// A JSON string with the escapes of Go's encoder.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text)
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_s_vector() {
        let ada = Login { username: "ada".into(), password: "smash".into(), email: "ada@example.com".into() };
        assert_eq!(credential_hash(&ada), "353258b53f5e9a57b059eab3f05312fc35bbeb874f08ce101e7bf0bf46977423");
        let without = Login { email: String::new(), ..ada.clone() };
        assert_ne!(credential_hash(&without), credential_hash(&ada));
        assert_eq!(quoted("<a&b>"), "\"\\u003ca\\u0026b\\u003e\"");
    }
}
