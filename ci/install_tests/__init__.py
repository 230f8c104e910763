"""Install tests: install wheels as users do, and check the result; also measure sizes."""
