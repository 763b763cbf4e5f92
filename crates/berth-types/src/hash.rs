//! Container spec hash, which decides whether a running container matches its spec, and FNV-1a. Pure.
//!
//! Bit-compatible with the reference, so that running containers can be adopted (spec 02b §13).

use std::hash::Hasher;

/// Container hash: FNV-1a-32 over the reference's dump of `{"image":…,"name":…}`; only these two fields count.
pub fn container_hash(name: &str, image: &str) -> u32 {
    let json = format!("{{\"image\":{},\"name\":{}}}", quoted(image), quoted(name));
    let mut dump = String::with_capacity(json.len() * 4 + 12);
    dump.push_str("([]uint8)[");
    for (i, byte) in json.bytes().enumerate() {
        if i > 0 {
            dump.push(' ');
        }
        dump.push_str(&byte.to_string());
    }
    dump.push(']');
    fnv1a_32(dump.as_bytes())
}

/// FNV-1a with 32 bits; also the checksum of the allocation checkpoints (spec 02a §8.1).
pub fn fnv1a_32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// FNV-1a with 64 bits.
pub fn fnv1a_64(bytes: &[u8]) -> u64 {
    let mut hasher = fnv::FnvHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

/// FNV-1a with 128 bits; the UID of a static pod is derived from it (spec 02a §1.2).
pub fn fnv1a_128(parts: &[&[u8]]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().copied().flatten();
    bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

/// Serializes a JSON string with the escapes of Go's encoder (`<`, `>`, `&` as `\u00XX`).
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
    fn hashes_equal_those_of_the_reference() {
        // AC-03a-12 and the vectors of spec 03a §6.1.
        for (name, image, hash) in [
            ("test_container", "foo/image:v1", 0x8e45_cbd0),
            ("foo", "bar", 0x11a6_d6d6),
            ("nginx", "nginx:1.27", 0x91ed_ee8f),
        ] {
            assert_eq!(container_hash(name, image), hash, "{name} {image}");
        }
    }

    #[test]
    fn the_wide_hash_has_the_published_vectors() {
        assert_eq!(fnv1a_128(&[]), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv1a_128(&[b"a"]), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(fnv1a_128(&[b"foo", b"bar"]), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn checksums_equal_those_of_the_reference() {
        let data = r#"(string){"entries":{"pod1":{"ContainerResources":{"container1":{"requests":{"cpu":"1Ki","memory":"1Ki"}}}}}}"#;
        assert_eq!(fnv1a_32(data.as_bytes()), 1_178_570_812);
    }
}
